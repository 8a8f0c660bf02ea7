"""Exact energies: the squared norm of every trajectory's gradient over all parameters, from one packed backward.

`Rows` says which trajectory owns each row, a `Contribution` is what one use of one parameter adds to every trajectory's
gradient, `Attachment` finds the uses in a model, `EnergyCollector` adds them up, and `ExactEnergies` runs a step with
them.
"""
