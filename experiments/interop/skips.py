"""Tests that cannot pass on another process than the one that asks, each with its reason."""

from __future__ import annotations

IDENTITY = "compares by identity what comes back from another process as an equal copy"
MEMORY = "reads or writes files in the memory of the test's process"
COUNTS = "looks for the effect of a function on a variable of the test, which another process does not share"
WARNING = "expects a warning of a task in its own process; it is shown on the worker's stderr"
UNSENT = "has in its graph what cannot be sent: a generator, a thread's lock, a ufunc of numpy.frompyfunc"
TARGET = "stores into an array of the test, whose memory another process does not share; refused as read-only"
LOCK = "holds a lock that its tasks would have to wait for, which another process does not share"
SETTING = "reads a setting of Dask while it is unpickled, before those of the program hold there, as on a Dask cluster"
BY_NAME = "starts a program that makes the executor by its name in concurrent.futures"

CORE = "dask/array/tests/test_array_core.py"
CUMULATIVE = "dask/array/tests/test_reductions.py::test_array_cumreduction_axis"
SHUTDOWN = "ExecutorShutdownTest"

TESTS: dict[str, tuple[str, ...]] = {
    IDENTITY: (
        "dask/tests/test_delayed.py::test_traverse_false",
        "dask/bag/tests/test_bag.py::test_repartition_partition_size_complex_dtypes",
        "dask/bag/tests/test_bag.py::test_bag_with_single_callable",
        "dask/dataframe/io/tests/test_parquet.py::test_filter_isna[True]",
        "dask/dataframe/io/tests/test_parquet.py::test_filter_isna[False]",
        "dask/dataframe/tests/test_extensions.py::test_register_extension_type",
    ),
    SETTING: ("dask/dataframe/tests/test_shuffle.py::test_disk_shuffle_with_unknown_compression",),
    COUNTS: (
        "dask/bag/tests/test_bag.py::test_to_delayed_optimize_graph",
        f"{CORE}::test_from_array_getitem[True-True]",
        f"{CORE}::test_from_array_getitem[False-True]",
        "dask/dataframe/dask_expr/tests/test_fusion.py::test_fusion_executes_only_once",
        "dask/dataframe/io/tests/test_io.py::test_from_map_column_projection",
    ),
    MEMORY: ("dask/dataframe/io/tests/test_parquet.py::test_fsspec_to_parquet_filesystem_option",),
    WARNING: (
        "dask/bag/tests/test_bag.py::test_take_npartitions_warn",
        "dask/bag/tests/test_text.py::test_files_per_partition",
        f"{CUMULATIVE}[blelloch-None-False-cumprod]",
        f"{CUMULATIVE}[blelloch-None-False-nancumprod]",
        f"{CUMULATIVE}[blelloch-None-True-cumprod]",
        f"{CUMULATIVE}[blelloch-None-True-nancumprod]",
        "dask/array/tests/test_routines.py::test_average_raises",
        "dask/array/tests/test_wrap.py::test_full_detects_da_dtype",
        "dask/dataframe/dask_expr/tests/test_collection.py::test_head",
        "dask/dataframe/tests/test_dataframe.py::test_head_npartitions_warn",
    ),
    UNSENT: (
        "dask/bag/tests/test_bag.py::test_reductions_are_lazy",
        f"{CORE}::test_store_locks_failure_lock_released",
        f"{CORE}::test_store_locks_one_lock_two_stores",
        f"{CORE}::test_store_locks_dont_assume_threadsafe",
        f"{CORE}::test_store_locks_no_lock",
        f"{CORE}::test_store_locks_count_calls[False]",
        f"{CORE}::test_store_locks_count_calls[True]",
        "dask/array/tests/test_ufunc.py::test_frompyfunc",
    ),
    TARGET: (
        f"{CORE}::test_store_delayed_target",
        f"{CORE}::test_store",
        f"{CORE}::test_store_regions",
        f"{CORE}::test_store_compute_false",
        f"{CORE}::test_store_method_return[False-True]",
        f"{CORE}::test_store_method_return[True-True]",
        f"{CORE}::test_memmap",
        f"{CORE}::test_store_sources_unoptimized_nocompute",
    ),
    LOCK: (
        f"{CORE}::test_from_array_with_lock[True]",
        f"{CORE}::test_from_array_with_lock[False]",
    ),
    BY_NAME: (
        f"{SHUTDOWN}.test_interpreter_shutdown",
        f"{SHUTDOWN}.test_submit_after_interpreter_shutdown",
        f"{SHUTDOWN}.test_hang_gh83386",
    ),
}
SKIPS = {test: reason for reason, tests in TESTS.items() for test in tests}
