"""What is happening: journal, progress, report."""
