"""API keys."""

import base64
import hashlib
import hmac
from collections.abc import Iterable

from services.gateway.errors import ApiError


class KeyRing:
    """The keys that open this server; with none, it is open to everybody."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have one length, so that comparing them says nothing of a key's.
        self._digests = tuple(_digest(key) for key in keys)

    def check(self, authorization: str) -> None:
        """Check an Authorization header field. Takes the same time whichever key it is, or none.

        Raises:
            ApiError: 401, if it holds no key of ours.
        """
        if not self._digests:
            return
        scheme, _, given = authorization.partition(" ")
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            problem = "the API key is not valid" if authorization else "an API key is required"
            raise ApiError(
                401,
                f"{problem}; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def check_browser(self, authorization: str) -> None:
        """Check as above, or by the Basic scheme, which browsers know: the password is the key.

        Raises:
            ApiError: 401, which makes a browser ask its user.
        """
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "basic":
            authorization = f"Bearer {_password(given.strip())}"
        try:
            self.check(authorization)
        except ApiError as error:
            raise ApiError(
                401,
                error.message,
                code=error.code,
                headers={"WWW-Authenticate": 'Basic realm="Legato: any name, and an API key"'},
            ) from None


def _password(credentials: str) -> str:
    """The password in what a browser sends; empty if there is none."""
    try:
        return base64.b64decode(credentials, validate=True).decode("utf-8", "surrogateescape").partition(":")[2]
    except ValueError:
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
