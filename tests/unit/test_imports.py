"""Files import each other in one direction."""

from graphlib import TopologicalSorter

import grimp


def test_no_file_imports_itself_through_others() -> None:
    graph = grimp.build_graph(
        "megatron_grpo", "megatron_grpo_kernels", exclude_type_checking_imports=True, cache_dir=None
    )
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 100
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the files of a cycle
