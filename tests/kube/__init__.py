"""Beside the test Kubernetes: its clients, the release that is installed on it, and the tests of both."""
