"""Adapters of frameworks, which learn their ranks and step by Paceline.

`lightning` and `fabric` have the strategy "paceline", `accelerate` an `Accelerator`, `transformers` a `Trainer`,
`torchtitan` an `OptimizersContainer`. Each needs its framework, which `pip install 'paceline[lightning]'`,
`'paceline[hf]'` or `'paceline[torchtitan]'` brings; none is imported before.
"""
