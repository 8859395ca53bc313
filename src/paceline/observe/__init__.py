"""What is happening: report, live page, doctor, Prometheus metrics, traces and loggers."""
