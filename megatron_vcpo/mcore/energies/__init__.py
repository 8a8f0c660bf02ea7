"""Exact energies: the squared norm of every trajectory's gradient over all parameters, from one packed backward.

`Rows` says whose a row is, a `Contribution` is what one use of one parameter adds to every trajectory's gradient,
`attach` finds the uses in a model, `EnergyCollector` adds them up, and `ExactEnergies` runs a step with them.
"""
