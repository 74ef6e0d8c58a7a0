"""Values that cross wings: requests, sampling, reports, statistics."""
