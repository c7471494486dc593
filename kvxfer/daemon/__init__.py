"""The daemon, `kvxfer serve`: its links in and out, messages to decisions and back, landings, metrics and probes."""
