"""What every process reports of itself: metrics (`instruments`), traces (`tracing`) and log lines (`logs`)."""
