"""Everything that runs experiments: data, models, workloads, rivals, runs, reports.

Nothing in `meka` itself imports from here; `pip install meka[lab]` brings what
this package needs. Importing it is cheap: modules load jax only when they compute.
"""
