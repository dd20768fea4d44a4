"""Programs that run on the box: standard library only, Python 3.8 to 3.13."""
