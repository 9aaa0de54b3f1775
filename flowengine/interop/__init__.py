"""Other people's interfaces on this engine: concurrent.futures, multiprocessing's Pool, Dask, joblib."""
