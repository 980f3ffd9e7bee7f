"""`veneer up` and `veneer down`."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from veneer.cli.output import console, say
from veneer.cli.target import Target
from veneer.errors import FailedPreconditionError
from veneer.local.stack import LocalStack
from veneer.local.state import StackState, command_for


def up(
    context: typer.Context,
    *,
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face folder of the base; else a small model is fetched once.")
    ] = None,
    tenant: Annotated[str, typer.Option(help="Tenant to make, with a key of all roles.")] = "demo",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32", "auto"],
        typer.Option(help="Of weights, activations and KV cache; auto: what the model's config.json names, else bfloat16."),
    ] = "bfloat16",
) -> None:
    """Start everything on this machine and leave it running: Postgres, Valkey, control plane, data plane."""
    target: Target = context.obj
    with console.status("preparing") as status:
        model_dir = model if model is not None else _small_model()
        stack = LocalStack(
            target.state_folder,
            model_dir,
            data_settings={"dtype": _dtype_of(model_dir) if dtype == "auto" else dtype},
            default_ports=True,
            durable=True,
            report=status.update,
        )
        stack.start()
        state = stack.add_tenant(tenant)
    say(_welcome(stack.folder, state))


def down(
    context: typer.Context,
    *,
    remove: Annotated[bool, typer.Option("--remove", help="Also remove all that was published.")] = False,
) -> None:
    """Stop what `veneer up` started."""
    target: Target = context.obj
    if not target.state_folder.is_dir():
        say(f"nothing runs in {target.state_folder}")
        return
    stack = LocalStack(target.state_folder)
    with console.status("stopping"):
        if remove:
            stack.remove()
        else:
            stack.stop()
    say("removed" if remove else f"stopped; what was published is kept in {stack.folder}")


def _small_model() -> Path:
    done = subprocess.run([sys.executable, "-m", "demo.prepare"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FailedPreconditionError(f"the small model could not be prepared; name one with --model:\n{done.stderr.strip()}")
    return Path(done.stdout.strip().splitlines()[-1])


def _dtype_of(model_dir: Path) -> str:
    """The type that a model was saved in, where a data plane computes in it; else bfloat16."""
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "bfloat16"  # the stack says what is wrong with the folder
    named = (config.get("dtype") or config.get("torch_dtype")) if isinstance(config, dict) else None
    return named if named in ("float16", "float32") else "bfloat16"


def _welcome(folder: Path, state: StackState) -> str:
    def veneer(*words: str) -> str:
        return command_for(folder, *words)

    return f"""
control plane  {state.control} (operators {state.control_operators}, metrics {state.control_metrics})
data plane     {state.data} (operators {state.data_operators}, metrics {state.data_metrics})
base           {state.base_name}
tenant         {state.tenant}
state and logs {folder}

Try:

  {veneer("generate")} "Why is the sea salt?"
  {veneer("publish")} PATH/TO/PEFT/FOLDER --adapter my-tone
  {veneer("generate")} --adapter my-tone "Why is the sea salt?"
  {veneer("status")}

Without the client:

  export VENEER_API_KEY=$(cat {shlex.quote(str(folder))}/tenant-{state.tenant}.key)

  buf curl --protocol grpc --http2-prior-knowledge -H "authorization: Bearer $VENEER_API_KEY" \\
    -d '{{"chat": {{"messages": [{{"role": "user", "content": "Hello!"}}]}}, "sampling": {{"max_tokens": 32}}}}' \\
    http://{state.data}/veneer.dataplane.v1.GenerationService/Generate

  buf curl --protocol grpc --http2-prior-knowledge -H "authorization: Bearer $VENEER_API_KEY" \\
    -d '{{}}' http://{state.control}/veneer.controlplane.v1.CatalogService/ListAdapters

Stop: {veneer("down")}
"""
