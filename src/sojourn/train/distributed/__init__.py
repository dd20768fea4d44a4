"""How the processes of one run share its work: one small file for each engine, and how they are started."""
