"""dKV without additions in memory: a row for each key of each list, summed in the lists' order."""
