"""Adapters of frameworks, which learn their ranks and step by Paceline.

`lightning` and `fabric` have the strategy "paceline", `accelerate` an `Accelerator`, `transformers` a `Trainer`. Each
needs its framework, which `pip install 'paceline[lightning]'` or `'paceline[hf]'` brings; none is imported before.
"""
