"""`queen cert`: a self-signed certificate."""

import contextlib
import datetime
import ipaddress
import os
import socket
from pathlib import Path
from typing import Annotated

import typer
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from queen.cli.common.tree import command, group
from queen.embedded.account import account_for
from queen.embedded.errors import EmbeddedPostgresError
from queen.errors import QueenError

app = group("Create a self-signed certificate.")


@command(app, "cert", example="queen cert /etc/queen --name queen.example.com")
def cert(
    directory: Annotated[Path, typer.Argument(help="Where to put cert.pem and key.pem.")] = Path(),
    name: Annotated[
        list[str] | None, typer.Option(help="A host name or address of the server; may be repeated.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long it is valid.")] = 365,
) -> None:
    """Create a self-signed certificate.

    Clients have to be told to trust it: [bold]curl --cacert cert.pem https://localhost:6632/health[/bold]
    """
    names = name or ["localhost", "127.0.0.1", socket.gethostname()]
    certificate, key = directory / "cert.pem", directory / "key.pem"
    for path in (certificate, key):
        if path.exists():
            raise QueenError(f"{path} exists already; choose another directory, or remove it")
    certificate_pem, key_pem = self_signed(names, days)
    directory.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key_pem)
    _give_to_workers(key)
    certificate.write_bytes(certificate_pem)
    print(f"{certificate} is for {', '.join(names)}, and valid for {days} days. Start the server with it:")
    print(f"  TLS_CERT={certificate.absolute()} TLS_KEY={key.absolute()} queen serve")


def _give_to_workers(key: Path) -> None:
    """Started by root, the workers of the server run as another user, who has to read the key."""
    if os.geteuid() == 0:
        # Without such a user they run as root.
        with contextlib.suppress(EmbeddedPostgresError):
            account_for(key).chown(key)


def self_signed(names: list[str], days: int) -> tuple[bytes, bytes]:
    """A certificate for these names, and its key, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        # Who trusts the one before it as well, under the same name, has to find the right one.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
