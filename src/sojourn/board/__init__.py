"""The board: runs, money and models in a browser."""
