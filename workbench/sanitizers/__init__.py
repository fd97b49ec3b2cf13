"""compute-sanitizer over small calls of every Hopper kernel."""
