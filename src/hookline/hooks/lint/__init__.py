"""Lint: checks that find silent training bugs while a model is trained.

A check is a class in one of the files named after its rule. `lint_hook.py` calls the checks,
`training_view.py` is what they look at, `torch_watch.py` sees what no event shows.
"""
