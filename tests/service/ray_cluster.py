"""Two Ray nodes on this machine, with Serve on a port: `ray_cluster PORT` runs until its standard input closes.

Each node is declared to have one CPU, and one of them a GPU: Ray does not check whether it is there.
"""

import sys

import ray
from ray import serve
from ray.cluster_utils import Cluster

if __name__ == "__main__":
    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_gpus=1, **node)
    ray.init(cluster.address, namespace="serve", log_to_driver=False)
    # One proxy: nodes that share a machine cannot both have the port.
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    print(cluster.address, flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()
