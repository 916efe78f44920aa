"""The chart: what helm makes of it, with both of its majors, and no cluster."""
