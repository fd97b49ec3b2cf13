"""The way of every call: declarations, their checks, the cache of calls, torch's dispatcher."""
