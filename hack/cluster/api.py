"""A few requests to an API server with the standard library: readiness, and a line about what an answer said."""

from __future__ import annotations

import http.client
import json
import ssl
from urllib.parse import urlsplit

from hack.cluster.components import Layout


class Api:
    """GET and server-side apply as the cluster's admin."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def request(
        self, method: str, path: str, body: object = None, content_type: str = "application/json", timeout: float = 5
    ) -> tuple[int, bytes]:
        """Status and body of one request over a connection of its own. Raises OSError when there is no answer."""
        pki, url = self._layout.pki, urlsplit(self._layout.server)
        context = ssl.create_default_context(cafile=str(pki.ca))
        context.load_cert_chain(pki.crt("admin"), pki.key("admin"))
        connection = http.client.HTTPSConnection(url.hostname or "", url.port, context=context, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, body=data, headers={"Content-Type": content_type})
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()

    def ok(self, path: str) -> bool:
        """True when a GET answers 200."""
        try:
            return self.request("GET", path)[0] == 200
        except OSError:
            return False

    def apply(self, path: str, obj: object) -> None:
        """Create or update one object by server-side apply; raises OSError with the server's message."""
        status, answer = self.request("PATCH", f"{path}?fieldManager=epochkv-cluster&force=true", obj, "application/apply-patch+yaml", 15)
        if status not in (200, 201):
            raise OSError(f"apply {path}: {status} {answer.decode(errors='replace')[:500]}")
