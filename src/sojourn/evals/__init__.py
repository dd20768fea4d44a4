"""How good a model is: held-out loss, exact answers."""
