"""`kvxfer bench`: our transports, physical references and rivals on the same work, receivers verifying every byte."""
