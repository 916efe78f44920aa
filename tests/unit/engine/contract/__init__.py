"""What every engine must do behind `ServingEngine`, whoever wrote it: one suite, and the engines that it runs on."""
