"""What connects kvxfer to engines and frameworks. Each module imports its framework; the core imports none of them."""
