"""captrain: trains, evaluates, exports and draws Capsule Networks. Of the service it knows the bundle contract alone."""
