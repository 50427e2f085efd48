"""Metrics for Prometheus: what there is, where the numbers live, who counts, how they are shown.

The engine counts in the observer `prometheus` (`engine.py`), an API process counts what it alone
sees; both write into one block of shared memory (`board.py`), from which any API process shows all
(`exposition.py`). `families.py` says what is counted.
"""
