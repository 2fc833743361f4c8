"""`Refused`: a request that gets no answer, as OpenAI's API says so. No HTTP here."""

from __future__ import annotations

from typing import Any

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error",
}


class Refused(Exception):
    """`status` is HTTP's, `param` the field that is wrong, `retry_after` the seconds until another try makes sense."""

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def to_json(self) -> dict[str, Any]:
        """The body of the answer, in OpenAI's form."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
