"""What the console scripts of the installed package run, one module each: `vcpo-plot-run` is `plot_run.main`.

Nothing else imports them but the files of the same names in the repository's tools/.
"""
