"""Time of collectives over a real placement: a start for each step, and bytes over the slower of NVLink and network adapters.

A group of `degree` ranks, `stride` ranks apart, has `inside` members in one NVLink domain. Rings cross a domain's border once for each of
its
members there, each by its own adapter, so a ring runs at `inside` adapters or at NVLink's rate, whichever is less. In an all-to-all each
rank sends
to peers outside its domain by its own adapter.
"""

from __future__ import annotations

from math import ceil, log2

from playbook.planner.time.cluster import Cluster
from playbook.planner.time.constants import (
    LINK_ALL_TO_ALL,
    LINK_DISPATCH,
    LINK_RING,
    LINK_START,
    NIC_ALL_TO_ALL,
    NIC_DISPATCH,
    NIC_RING,
    NIC_START,
)
from playbook.planner.traffic import distinct


def inside(cluster: Cluster, degree: int, stride: int) -> int:
    """Members of a group in one NVLink domain: the largest number that divides the group and fits."""
    fits = max(1, min(degree, cluster.domain // max(stride, 1)))
    while degree % fits:
        fits -= 1
    return fits


def ring(cluster: Cluster, degree: int, stride: int, num_bytes: float, pieces: int = 1) -> float:
    """Seconds of an all-gather or a reduce-scatter whose whole tensor has so many bytes, sent in so many pieces that start one by one."""
    if degree <= 1:
        return 0.0
    near = inside(cluster, degree, stride)
    supposed = LINK_START.value * ceil(log2(near)) if near > 1 else 0.0, LINK_RING.value * cluster.link_bytes_per_s
    starts, rate = cluster.rings.get(degree, supposed) if near == degree else supposed
    if near < degree:
        rate = min(rate, NIC_RING.value * cluster.nic_bytes_per_s * near)
        starts += NIC_START.value * ceil(log2(degree / near))
    return pieces * starts + num_bytes * (degree - 1) / degree / rate


def all_to_all(cluster: Cluster, degree: int, stride: int, num_bytes: float) -> float:
    """Seconds of an all-to-all in which each rank holds so many bytes, evenly for all; both networks work at once."""
    if degree <= 1:
        return 0.0
    near = inside(cluster, degree, stride)
    link = num_bytes * (near - 1) / degree / (LINK_ALL_TO_ALL.value * cluster.link_bytes_per_s)
    if near == degree:
        return LINK_START.value + link
    nic = num_bytes * (degree - near) / degree / (NIC_ALL_TO_ALL.value * cluster.nic_bytes_per_s)
    return NIC_START.value + max(link, nic)


def dispatch_once(cluster: Cluster, degree: int, stride: int, token_bytes: float, top_k: int) -> float:
    """Seconds of a dispatch that sends each token once to every other domain, and there over NVLink to each rank that wants it.

    `token_bytes` are those of a rank's tokens, each counted once.
    """
    if degree <= 1:
        return 0.0
    near = inside(cluster, degree, stride)
    domains = degree // near
    copies = distinct(degree, top_k) * (near - 1) / near
    link = token_bytes * copies / (LINK_DISPATCH.value * cluster.link_bytes_per_s)
    if domains == 1:
        return LINK_START.value + link
    nic = token_bytes * distinct(domains, top_k) * (domains - 1) / domains / (NIC_DISPATCH.value * cluster.nic_bytes_per_s)
    return NIC_START.value + max(link, nic)


def send(cluster: Cluster, stride: int, num_bytes: float) -> float:
    """Seconds of one message to the rank so many ranks away."""
    if stride < cluster.domain:
        return LINK_START.value + num_bytes / (LINK_RING.value * cluster.link_bytes_per_s)
    return NIC_START.value + num_bytes / (NIC_RING.value * cluster.nic_bytes_per_s)
