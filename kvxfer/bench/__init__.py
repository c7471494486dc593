"""`kvxfer bench`: our transports and physical references on the same work, receivers verifying every byte."""
