"""The pure parts of the test Kubernetes."""
