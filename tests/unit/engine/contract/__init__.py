"""The checks that every engine behind `ServingEngine` must pass, and the engines that they run on."""
