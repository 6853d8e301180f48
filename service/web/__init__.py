"""HTTP around the endpoints: connections, bodies, headers, errors, what every request gets."""
