"""What the tests of several rooms share: how they wait, what values they build, what load they put on a cluster."""
