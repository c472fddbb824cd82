"""Networks between nodes by a short name, such as `IB-400`: one grammar for every command."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from playbook.errors import ConfigError
from playbook.planner.time.cluster import Cluster

_NAME = re.compile(r"(?:(?P<gbe>\d{1,4})GbE|(?P<kind>IB|RoCE|EFA)-(?P<rate>\d{1,5}))", re.IGNORECASE | re.ASCII)
_EXPECTED = (
    "100GbE (of one adapter for a node), RoCE-200 or IB-400 (of one adapter for each GPU), or EFA-3200 (of a node); the numbers are Gbit/s"
)
_NO_INFINIBAND = frozenset({"none", "no infiniband", "no-infiniband", "ethernet"})
_ETHERNET = "100GbE"
"""What stands for a network of which is known only that it is not InfiniBand."""
_BITS = 8
_GIGA = 1e9


def on_network(cluster: Cluster, network: str) -> Cluster:
    """The cluster with its nodes joined by a network such as `100GbE`, `RoCE-200`, `IB-400` or `EFA-3200`; `none` says that there is no
    InfiniBand.

    InfiniBand and RoCE are rates of an adapter, of which a GPU has one unless a file says otherwise; Ethernet and EFA are rates of a node,
    which its GPUs share.

    Raises:
        ConfigError: no such network is known.
    """
    plain = network.strip()
    name = _ETHERNET if plain.lower() in _NO_INFINIBAND else plain
    match = _NAME.fullmatch(name)
    gbits = int(match["gbe"] or match["rate"]) if match else 0
    if match is None or not gbits:
        raise ConfigError(f"network is '{plain[:40]}'; expected {_EXPECTED}; or none, without InfiniBand")
    of_a_gpu = bool(match["kind"]) and match["kind"].lower() != "efa"
    rate = gbits * _GIGA / _BITS * (cluster.adapters if of_a_gpu else 1 / cluster.node)
    taken_as = f", taken as {_ETHERNET}" if name != plain else ""
    return _joined(cluster, rate, f"network {plain}{taken_as}: {rate / _GIGA:.3g} GB/s for each GPU between nodes")


@lru_cache(maxsize=256)
def _joined(cluster: Cluster, rate: float, words: str) -> Cluster:
    """One object for one network, since times of layers are remembered by their cluster."""
    return replace(cluster, nic_bytes_per_s=rate, network=words)
