"""Memory that processes of one machine have in common, on a device or in the host: messages in it are not sent."""
