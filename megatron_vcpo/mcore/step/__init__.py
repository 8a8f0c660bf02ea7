"""One optimizer step of VCPO on Megatron-Core's schedules.

build        a step for a model and an optimizer
policy_step  PolicyStep, and the order of its calls
scoring      log-weights, energies and baselines from a forward-only pass
statistics   reductions over ranks; exclusions, soundness: what cannot be trained on
outcome      StepOutcome: whether the parameters changed, and why not
"""
