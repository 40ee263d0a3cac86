"""`queen config`, `login`, `logout`, `completion` and `docs`: which servers there are, and how to get at them."""

from __future__ import annotations

import getpass
import sys
import urllib.error
import urllib.request
import webbrowser
from http.cookies import SimpleCookie
from typing import Annotated, Any

import msgspec
import typer

from queen.cli.common.contexts import forget_token, store_token
from queen.cli.common.exits import AuthFailed, ServerFailed, UserError, connection_failure
from queen.cli.common.output import Column
from queen.cli.common.session import Session, check_server
from queen.cli.common.tree import command, group

app = group("Contexts: servers and their tokens.")
login_app = group("Log in to the server of a context.")
logout_app = group("Delete the token of a context.")
completion_app = group("Print the completion script of a shell.")
docs_app = group("Print where the documentation is.")

ContextName = Annotated[str, typer.Argument(help="The context.", metavar="NAME")]

SHELLS = ("bash", "zsh", "fish", "powershell")
_CONTEXTS = (
    Column("CURRENT", lambda row: "*" if row["current"] else ""),
    Column("NAME", "name"),
    Column("SERVER", "server"),
    Column("AUTH", "auth"),
    Column("INSECURE", "insecure", wide=True),
)
_PAGES = (
    *("settings", "topics", "streams", "tasks", "state", "sql", "sqs", "websocket", "celery", "airflow"),
    *("pipelines", "lineage", "tables", "spark", "spark-writing", "spark-cluster", "dashboard", "proxy", "security"),
    *("deployment", "sizing", "tuning", "upgrade", "backup", "high-availability", "cluster", "shards", "redis"),
    *("failover", "retention", "reliability", "monitoring", "alerts", "logging-and-tracing", "troubleshooting"),
    *("architecture", "glossary"),
)
_TOPICS = {
    "cli": "docs/cli.md",
    "http": "docs/http-api.md",
    "client": "docs/client/README.md",
    **{name: f"docs/{name}.md" for name in _PAGES},
}
_LOGIN_SECONDS = 30.0
_ZSH_REGISTERS = "compdef _queen_completion queen"
_ZSH_COMPLETES = f"""{_ZSH_REGISTERS}
if (( $+compstate )); then
  _queen_completion "$@"
fi"""


@command(app, "view", example="queen config view")
def view(ctx: typer.Context) -> None:
    """Print the configuration; tokens are not shown."""
    session = Session.of(ctx)
    contexts = session.contexts
    session.out.value({"current-context": contexts.current, "contexts": [_hidden(entry) for entry in contexts.entries]})


@command(app, "current-context", example="queen config current-context")
def current_context(ctx: typer.Context) -> None:
    """Print the name of the context in use."""
    session = Session.of(ctx)
    if session.contexts.current is None:
        raise UserError("no context is in use; queen config use-context NAME chooses one")
    session.out.text(session.contexts.current)


@command(app, "get-contexts", aliases=("list",), example="queen config get-contexts -o wide")
def get_contexts(ctx: typer.Context) -> None:
    """List the contexts."""
    session = Session.of(ctx)
    rows = [
        {
            "current": entry["name"] == session.contexts.current,
            "name": entry["name"],
            "server": entry.get("server"),
            "auth": str(entry.get("token-ref") or "").partition(":")[0] or None,
            "insecure": bool(entry.get("insecure")),
        }
        for entry in session.contexts.entries
    ]
    session.out.rows(rows, _CONTEXTS)


@command(
    app,
    "set-context",
    example="""
queen config set-context local --server http://localhost:6632
queen config set-context production --server https://queen.example --token-ref env
""",
)
def set_context(
    ctx: typer.Context,
    name: ContextName,
    server: Annotated[str | None, typer.Option("--server", help="URL of the server.")] = None,
    token: Annotated[str | None, typer.Option("--token", help="A token to keep.")] = None,
    token_ref: Annotated[
        str | None, typer.Option("--token-ref", help="env, keychain://id, file:///path or literal:token.")
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure/--secure", help="Whether the server's certificate goes unchecked.")
    ] = None,
    no_keychain: Annotated[bool, typer.Option("--no-keychain", help="Keep the token in the file.")] = False,
) -> None:
    """Make a context, or change what is named of one."""
    session = Session.of(ctx)
    if token is not None and token_ref is not None:
        raise UserError("--token and --token-ref exclude each other")
    if server is not None:
        check_server(server)
    contexts = session.contexts
    if token is not None:
        token_ref = store_token(name, token, keychain=not no_keychain)
    contexts.set(name, server=server, token_ref=token_ref, insecure=insecure)
    contexts.save()
    session.out.done(f'context "{name}" set')


@command(app, "use-context", aliases=("use",), example="queen config use-context production")
def use_context(ctx: typer.Context, name: ContextName) -> None:
    """Choose the context that commands use."""
    session = Session.of(ctx)
    session.contexts.get(name)
    session.contexts.current = name
    session.contexts.save()
    session.out.done(f'switched to context "{name}"')


@command(app, "delete-context", aliases=("delete", "rm"), example="queen config delete-context production")
def delete_context(ctx: typer.Context, name: ContextName) -> None:
    """Delete a context and its token."""
    session = Session.of(ctx)
    forget_token(session.contexts.get(name).get("token-ref"))
    session.contexts.delete(name)
    session.contexts.save()
    session.out.done(f'deleted context "{name}"')


@command(
    login_app,
    "login",
    example="""
queen login --method token --token "$JWT"
queen login --method password -u ada --context production
""",
)
def login(
    ctx: typer.Context,
    method: Annotated[str, typer.Option("--method", help="token, password or google.")] = "token",
    user: Annotated[str | None, typer.Option("-u", "--user", help="Name to log in with.")] = None,
    password: Annotated[str | None, typer.Option("--password", help="Password. [prompt]")] = None,
    token: Annotated[str | None, typer.Option("--token", help="The token. [prompt]")] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address instead of opening it.")] = False,
    no_keychain: Annotated[bool, typer.Option("--no-keychain", help="Keep the token in the file.")] = False,
) -> None:
    """Log in to the server of a context, and keep the token with it.

    Exit code 3 when the login is refused.
    """
    session = Session.of(ctx)
    name, url = _login_target(session)
    _check_context(session, name, url)
    if method == "token":
        found = token or _ask("Token")
    elif method == "password":
        found = _password_login(session, url, user or input("User: "), password or _ask("Password"))
    elif method == "google":
        address = f"{url}/api/auth/google"
        if no_browser or not webbrowser.open(address):
            session.out.note(f"log in at {address}")
        found = token or _ask("Token")
    else:
        raise UserError(f"--method must be token, password or google, not {method!r}")
    if not found.strip():
        raise AuthFailed("no token was given")
    contexts = session.contexts
    contexts.set(name, server=url, token_ref=store_token(name, found.strip(), keychain=not no_keychain))
    if contexts.current is None:
        contexts.current = name
    contexts.save()
    session.out.done(f'logged in to {url} (context "{name}")')


@command(logout_app, "logout", example="queen logout\nqueen logout --context production")
def logout(ctx: typer.Context) -> None:
    """Delete the token of a context."""
    session = Session.of(ctx)
    name, _ = _login_target(session)
    entry = session.contexts.get(name)
    forget_token(entry.pop("token-ref", None))
    session.contexts.save()
    session.out.done(f'logged out (context "{name}")')


@command(
    completion_app,
    "completion",
    example="""
queen completion bash > ~/.local/share/bash-completion/completions/queen
queen completion zsh > ~/.zfunc/_queen
queen completion fish > ~/.config/fish/completions/queen.fish
""",
)
def completion(shell: Annotated[str, typer.Argument(help="bash, zsh, fish or powershell.")]) -> None:
    """Print the completion script of a shell."""
    if shell not in SHELLS:
        raise UserError(f"there is completion for {', '.join(SHELLS)}, not for {shell!r}")
    import typer.completion

    script = vars(typer.completion)["get_completion_script"]
    text = script(prog_name="queen", complete_var="_QUEEN_COMPLETE", shell=shell)
    if shell == "zsh":
        # Loaded from $fpath at the first Tab, the script would register itself and complete nothing before the second.
        text = text.replace(_ZSH_REGISTERS, _ZSH_COMPLETES)
    print(text)


@command(docs_app, "docs", example="queen docs\nqueen docs --topic cli --open")
def docs(
    ctx: typer.Context,
    open_: Annotated[
        bool, typer.Option("--open", help="Open the API documentation of the server in a browser.")
    ] = False,
    topic: Annotated[str | None, typer.Option("--topic", help="Only this page, such as cli or backup.")] = None,
    reference: Annotated[
        bool, typer.Option("--reference", help="Print the reference of all commands instead, as Markdown.")
    ] = False,
) -> None:
    """Print where the documentation is."""
    if reference:
        from queen.cli.app import tree
        from queen.cli.common.tree import reference as reference_of

        print(reference_of(tree()), end="")
        return
    if topic is not None and topic not in _TOPICS:
        raise UserError(f"there are pages about {', '.join(_TOPICS)}, not about {topic!r}")
    server = Session.of(ctx).server.url
    for name in [topic] if topic else _TOPICS:
        print(f"{name}: {_TOPICS[name]}")
    print(f"HTTP API: {server}/docs")
    if open_:
        webbrowser.open(f"{server}/docs")


def _login_target(session: Session) -> tuple[str, str]:
    server = session.server
    return server.context or "default", server.url


def _check_context(session: Session, name: str, url: str) -> None:
    """A context that is only the current one keeps its server: commands that use it would go to another from now on."""
    entry = next((one for one in session.contexts.entries if one["name"] == name), {})
    known = str(entry.get("server") or url).rstrip("/")
    if known != url and not session.context_is_named:
        raise UserError(
            f'context "{name}" is for {known}; make one (queen config set-context NAME --server {url}), '
            "and log in with --context NAME"
        )


def _password_login(session: Session, url: str, user: str, password: str) -> str:
    """The token that the proxy gives for a name and a password; it comes as a cookie."""
    body = msgspec.json.encode({"username": user, "password": password})
    request = urllib.request.Request(f"{url}/api/login", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_LOGIN_SECONDS, context=session.tls_context()) as answer:
            cookies = SimpleCookie()
            for header in answer.headers.get_all("Set-Cookie", []):
                cookies.load(header)
            decoded = _object(answer.read())
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise AuthFailed(f"{url} refuses the login of {user}; check the name and the password") from error
        raise ServerFailed(f"{url}/api/login answered {error.code}; is it the proxy?") from error
    except OSError as error:
        why, step = connection_failure(error)
        raise ServerFailed(f"cannot reach {url}: {why}; {step}") from error
    if "token" in cookies:
        return cookies["token"].value
    if isinstance(decoded.get("token"), str):
        return str(decoded["token"])
    raise ServerFailed(f"{url}/api/login returned no token; is it the proxy?")


def _object(body: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _ask(what: str) -> str:
    """Something secret from the person at the terminal, or a line of stdin."""
    if sys.stdin.isatty():
        return getpass.getpass(f"{what}: ")
    return sys.stdin.readline().strip()


def _hidden(entry: dict[str, Any]) -> dict[str, Any]:
    reference = str(entry.get("token-ref") or "")
    if not reference or reference == "env" or reference.startswith(("keychain://", "file://")):
        return entry
    return {**entry, "token-ref": "literal:***"}
