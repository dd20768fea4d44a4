"""Files import each other in one direction only, also for types and inside functions."""

from graphlib import TopologicalSorter

import grimp


def test_no_files_import_each_other_in_a_circle():
    graph = grimp.build_graph("sojourn", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # a CycleError names them
