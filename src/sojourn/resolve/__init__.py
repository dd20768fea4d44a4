"""Every `auto` of a run, decided once for plans and runs alike (no torch)."""
