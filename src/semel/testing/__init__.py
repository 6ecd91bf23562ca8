"""What proves a pipeline or a sink right: contracts, crashes, kills, audits and real services."""
