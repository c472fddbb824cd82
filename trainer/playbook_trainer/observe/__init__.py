"""What a run reports of itself: metrics, receipt, ranges, kernels, trackers."""
