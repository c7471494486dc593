"""What shows kvxfer at work: run from a checkout, and installed beside the package for `kvxfer demo`."""
