"Usage: python clusters.py ENGINE HOME. Query the run 'a' on a real cluster of two workers on this machine."
import json
import sys
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).parents[:2]) # the folders that pytest adds to the module path

def main(engine, home):
    from test_scan import ask_dask, ask_ray

    from torchember import scan
    if engine=='dask':
        from distributed import Client, LocalCluster
        with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster): return ask_dask(scan('a', 'dask', home=home))
    import ray
    ray.init(num_cpus=2, include_dashboard=False, logging_level='ERROR', log_to_driver=False)
    try: return ask_ray(scan('a', 'ray', home=home))
    finally: ray.shutdown()

if __name__=='__main__': print('answer', json.dumps(main(*sys.argv[1:])))
