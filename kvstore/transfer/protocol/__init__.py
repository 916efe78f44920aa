"""What two workers agree on, and who owns which blocks at each moment. Pure: no I/O, no threads, no clock."""
