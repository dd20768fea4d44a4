"""Plots, as SVG files and in the terminal."""
