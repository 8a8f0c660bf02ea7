"""The flags: that they are the dataclasses, and what is refused before anything starts. No engine, no process group."""

from __future__ import annotations

import argparse
import dataclasses
import os
import stat
from pathlib import Path

import pytest

from megatron_vcpo.config import ConfigError, PluginConfig, RolloutConfig, SyncConfig, VCPOConfig
from megatron_vcpo.launch.idle_flags import idle_flags
from megatron_vcpo.patches import megatron_cpu, megatron_help_percent
from tests.oracle.command_line import CommandLine

GROUPS = {"vcpo": VCPOConfig, "rollout": RolloutConfig, "sync": SyncConfig}


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(tmp_path, monkeypatch)


def plugin_parser() -> argparse.ArgumentParser:
    from megatron_vcpo.launch.flags import add_vcpo_args

    return add_vcpo_args(argparse.ArgumentParser())


def actions() -> dict[str, argparse.Action]:
    return {a.dest: a for a in plugin_parser()._actions if a.dest.split("_")[0] in GROUPS}


# ---------------------------------------------------------------------- flags are the dataclasses


def test_every_field_is_a_flag_with_the_dataclass_default() -> None:
    found = actions()
    expected = {f"{prefix}_{f.name}" for prefix, group in GROUPS.items() for f in dataclasses.fields(group)}
    assert found.keys() == expected
    for prefix, group in GROUPS.items():
        for field in dataclasses.fields(group):
            action = found[f"{prefix}_{field.name}"]
            assert action.option_strings[0] == f"--{prefix}-{field.name.replace('_', '-')}"
            assert action.default == getattr(group(), field.name), action.dest


def test_every_flag_explains_itself_and_states_its_default() -> None:
    formatter = plugin_parser()._get_formatter()
    for action in actions().values():
        text = formatter._expand_help(action)
        assert len(text) > 15, action.dest
        assert "Default:" in text, action.dest
        if "Default: " in text and action.default not in (None, "") and "%" not in str(action.default):
            assert str(action.default) in text, action.dest


def test_processes_wait_for_one_another_less_long_than_megatrons_collectives(command_line: CommandLine) -> None:
    assert command_line.parse("--distributed-timeout-minutes", "20")[1].vcpo.phase_deadline == 1080.0
    assert command_line.parse("--vcpo-phase-deadline", "7")[1].vcpo.phase_deadline == 7.0


def test_an_overflow_lowers_the_loss_scale_at_once_so_that_a_retry_can_succeed(command_line: CommandLine) -> None:
    assert command_line.parse()[0].hysteresis == 1
    assert command_line.parse()[1].vcpo.overflow_retries == 1


def test_defaults_alone_make_a_configuration_that_is_accepted() -> None:
    PluginConfig().validate()


def test_flags_reach_the_dataclasses(command_line: CommandLine) -> None:
    _, config = command_line.parse(
        *(
            "--vcpo-ess-scaling",
            "linear",
            "--rollout-stop",
            "\n",
            "x",
            "--sync-verify",
            "every",
            "--vcpo-baseline",
            "mean",
        ),
        *("--rollout-quiet", "--vcpo-correction-upper", "3.5"),
    )
    assert config.vcpo.ess_scaling == "linear"
    assert config.vcpo.correction_upper == 3.5
    assert config.vcpo.baseline == "mean"
    assert config.rollout.stop == ["\n", "x"]
    assert config.rollout.quiet is True
    assert config.sync.verify == "every"


def test_what_follows_from_other_flags_is_filled_in(command_line: CommandLine) -> None:
    args, config = command_line.check("--rollout-max-response-length", "24", "--seed", "7")
    assert config.rollout.max_prompt_length == 40
    assert config.vcpo.tokens_per_micro_batch == 64
    assert config.rollout.seed == 7
    assert (args.global_batch_size, args.micro_batch_size, args.padded_vocab_size) == (16, 1, 128)
    assert args.variable_seq_lengths is True


def test_the_adjustment_comes_before_the_checks(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_vcpo import supervised
    from megatron_vcpo.launch import flags as arguments

    monkeypatch.setattr("sys.argv", ["x", *command_line.flags("--rollout-responses-per-prompt", "1")])
    monkeypatch.setenv("WORLD_SIZE", "1")
    _, config = arguments.parse(supervised.adjust)
    assert config.vcpo.baseline == "none"
    with pytest.raises(ConfigError):
        arguments.parse()


def test_an_unknown_flag_is_answered_in_two_lines(
    command_line: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line.parse("--vcpo-bogus", "1")
    assert caught.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2
    assert "--vcpo-bogus" in lines[1]


@pytest.mark.skipif(not megatron_cpu.active(), reason="needs only Megatron's parser")
def test_megatron_help_still_holds_a_bare_percent_sign() -> None:
    """When this fails, patches/megatron_help_percent.py is no longer needed."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    assert megatron_help_percent.broken_actions(parser)
    megatron_help_percent.apply(parser)
    assert not megatron_help_percent.broken_actions(parser)
    assert "--num-layers" in parser.format_help()


# ---------------------------------------------------------------------- refusals

BAD_NUMBERS = [
    ("--vcpo-ess-reference", "0", "(0, 1]"),
    ("--vcpo-ess-reference", "1.5", "(0, 1]"),
    ("--vcpo-ess-reference", "nan", "(0, 1]"),
    ("--vcpo-ess-reference", "sometimes", "'auto'"),
    ("--vcpo-ess-reference-steps", "0", "at least 1"),
    ("--vcpo-ess-floor", "1.1", "[0, 1]"),
    ("--vcpo-ess-floor", "nan", "finite"),
    ("--vcpo-veto-ratio", "-1", "must lie in [0, 1)"),
    ("--vcpo-kl-coefficient", "inf", "finite"),
    ("--vcpo-kl-coefficient", "-0.1", "negative"),
    ("--vcpo-entropy-coefficient", "nan", "finite"),
    ("--vcpo-correction-upper", "-2", "negative"),
    ("--vcpo-correction-lower", "inf", "finite"),
    ("--vcpo-tokens-per-micro-batch", "0", "at least 1"),
    ("--vcpo-logit-chunk", "-1", "at least 0"),
    ("--vcpo-dry-run-processes", "0", "at least 1"),
    ("--rollout-temperature", "0", "above 0"),
    ("--rollout-temperature", "inf", "finite"),
    ("--rollout-temperature", "nan", "finite"),
    ("--rollout-temperature", "0.005", "between 0.01 and 100"),
    ("--rollout-temperature", "1e300", "between 0.01 and 100"),
    ("--rollout-reward-workers", "100000", "at most 1024"),
    ("--rollout-stop", "", "empty string"),
    ("--rollout-seed", "-1", "between 0 and 2^32 - 1"),
    ("--rollout-top-p", "0.9", "leave them at 1.0 and 0"),
    ("--rollout-top-k", "20", "leave them at 1.0 and 0"),
    ("--rollout-prompts-per-step", "0", "at least 1"),
    ("--rollout-max-response-length", "0", "at least 1"),
    ("--rollout-max-prompt-length", "0", "at least 1"),
    ("--rollout-max-lag", "-1", "at least 0"),
    ("--rollout-steps-per-phase", "0", "at least 1"),
    ("--rollout-engine-tensor-parallel-size", "0", "at least 1"),
    ("--rollout-engine-kv-cache-bytes", "0", "at least 1"),
    ("--rollout-engine-kv-cache-bytes", "4096", "fewer than the longest sequence"),
    ("--rollout-engine-max-sequences", "0", "at least 1"),
    ("--rollout-reward-workers", "0", "at least 1"),
    ("--rollout-reward-timeout", "0", "positive"),
    ("--rollout-reward-timeout", "inf", "finite"),
    ("--rollout-reward-timeout", "1e300", "at most 604800"),
    ("--rollout-eval-interval", "-1", "at least 0"),
    ("--rollout-eval-num-prompts", "0", "at least 1"),
    ("--rollout-eval-temperature", "-1", "negative"),
    ("--rollout-eval-samples", "4", "--rollout-eval-temperature"),
    ("--sync-interval", "0", "at least 1"),
    ("--sync-bucket-bytes", "1", "at least 65536"),
    ("--sync-verify-tolerance", "0", "positive"),
    ("--sync-verify", "sometimes", "off, first or every-N"),
    ("--sync-timeout", "0", "between 1 and 604800"),
    ("--sync-timeout", "1e-9", "between 1 and 604800"),
    ("--sync-timeout", "1e300", "between 1 and 604800"),
    ("--vcpo-phase-deadline", "1e300", "between 1 and 604800"),
    ("--vcpo-phase-deadline", "1e-300", "between 1 and 604800"),
    *[
        (flag, "1000000000000", "at most")
        for flag in (
            *("--vcpo-tokens-per-micro-batch", "--vcpo-logit-chunk", "--vcpo-overflow-retries"),
            *("--vcpo-ess-reference-steps", "--vcpo-dry-run-processes", "--rollout-prompts-per-step"),
            *("--rollout-responses-per-prompt", "--rollout-steps-per-phase", "--rollout-max-lag"),
            *("--rollout-max-response-length", "--rollout-max-prompt-length", "--rollout-engine-max-sequences"),
            *("--rollout-engine-tensor-parallel-size", "--rollout-eval-num-prompts", "--rollout-eval-samples"),
            *("--rollout-eval-interval", "--rollout-save-trajectories", "--rollout-save-batch", "--sync-interval"),
            *("--rollout-seed", "--sync-bucket-bytes"),
        )
    ],
    ("--rollout-engine-kv-cache-bytes", "1" + "0" * 40, "at most 4398046511104, not a number of more than 30 digits"),
    ("--vcpo-kl-coefficient", "1e300", "at most 1e+30"),
    ("--vcpo-entropy-coefficient", "-1e300", "at most 1e+30"),
    ("--sync-verify", "every-1000000000000", "off, first or every-N"),
    ("--log-interval", "0", "at least 1"),
    ("--clip-grad", "nan", "must be a number"),
    ("--make-vocab-size-divisible-by", "0", "at least 1"),
    ("--distributed-timeout-minutes", "-1", "at least 1"),
    ("--kv-channels", "7", "even size"),
    ("--expert-model-parallel-size", "0", "do not divide into groups"),
    ("--expert-model-parallel-size", "2", "do not divide into groups"),
    ("--wandb-project", "x", "--wandb-save-dir"),
    ("--tensorboard-dir", "/dev/null/x", "is not a folder"),
    ("--lr", "nan", "positive number"),
    ("--lr", "0", "positive number"),
    ("--lr", "inf", "positive number"),
    ("--train-iters", "0", "positive number"),
]


@pytest.mark.parametrize(("flag", "value", "fragment"), BAD_NUMBERS, ids=lambda v: str(v).lstrip("-"))
def test_a_number_that_cannot_work_is_refused_with_its_flag(
    command_line: CommandLine, flag: str, value: str, fragment: str
) -> None:
    sentence = command_line.refusal(f"{flag}={value}")
    assert flag in sentence
    assert fragment in sentence


CONTRADICTIONS = {
    "exact energies of no optimal baseline": (
        ["--vcpo-energy", "exact", "--vcpo-baseline", "mean"],
        "--vcpo-baseline is mean",
    ),
    "exact energies in accumulators": (
        ["--vcpo-energy", "exact", "--vcpo-energy-method", "accumulators"],
        "--vcpo-baseline-scope minibatch",
    ),
    "exact energies of layers in pieces": (
        ["--vcpo-energy", "exact", "--recompute-granularity", "selective", "--recompute-modules", "mlp"],
        "--recompute-granularity full",
    ),
    "group of one": (["--rollout-responses-per-prompt", "1", "--vcpo-reward-normalization", "none"], "minibatch"),
    "deviation of one": (["--rollout-responses-per-prompt", "1", "--vcpo-baseline", "none"], "group-std"),
    "one trajectory": (
        [
            *("--rollout-responses-per-prompt", "1", "--rollout-prompts-per-step", "1"),
            *("--vcpo-baseline-scope", "minibatch", "--vcpo-reward-normalization", "minibatch-std"),
        ],
        "One trajectory",
    ),
    "a band without fresh samples": (
        ["--vcpo-correction", "token-mis", "--vcpo-correction-upper", "0.9"],
        "leave out the ratio 1",
    ),
    "more experts a token than there are": (
        ["--num-experts", "4", "--moe-router-topk", "5"],
        "between 1 and --num-experts 4",
    ),
    "experts in no layer": (["--num-experts", "4", "--moe-layer-freq", "[0,0]"], "no layer with experts"),
    "experts in every zeroth layer": (["--num-experts", "4", "--moe-layer-freq", "0"], "must be at least 1"),
    "Megatron's own reinforcement learning": (["--perform-rl-step"], "--perform-rl-step"),
    "two activations": (["--squared-relu"], "Megatron refuses"),
    "a prompt that never fits": (
        ["--rollout-max-prompt-length", "2"],
        "longer than --rollout-max-prompt-length 2",
    ),
    "more than one memory holds in a phase": (
        ["--rollout-prompts-per-step", "100000", "--rollout-max-lag", "1000"],
        "= 400400000 trajectories, and at most 16777216",
    ),
    "more than one memory holds in an evaluation": (
        [
            *("--rollout-eval-num-prompts", "100000", "--rollout-eval-samples", "1000"),
            *("--rollout-eval-temperature", "1"),
        ],
        "= 100000000 responses of one evaluation",
    ),
    "bytes that are no text": (["--rollout-stop", "\udcff"], "(--rollout-stop) is not UTF-8 text: '\\udcff'"),
    "nowhere to save": (["--save", "", "--save-interval", "1"], "--save is given an empty path"),
    "nowhere to run": (["--rollout-run-dir", ""], "--rollout-run-dir is given an empty path"),
    "crossed bounds": (
        ["--vcpo-correction", "icepop", "--vcpo-correction-lower", "6", "--vcpo-correction-upper", "5"],
        "below --vcpo-correction-upper",
    ),
    "bound above the correction's own": (
        ["--vcpo-correction", "icepop", "--vcpo-correction-lower", "6"],
        "(6.0) must be below --vcpo-correction-upper (5.0)",
    ),
    "weights of zero": (["--vcpo-correction-upper", "0"], "every weight of sequence-tis zero"),
    "veto of everything": (["--vcpo-veto-ratio", "1.5"], "--vcpo-veto-ratio must lie in [0, 1)"),
    "capped without a cap": (["--vcpo-correction", "none", "--vcpo-ess-weights", "capped"], "--vcpo-correction-upper"),
    "response longer than the sequence": (["--rollout-max-response-length", "64"], "--seq-length is 64"),
    "longer than the model": (["--max-position-embeddings", "8"], "--max-position-embeddings 8"),
    "prompt and response longer than the model": (
        ["--rollout-max-prompt-length", "60", "--max-position-embeddings", "64"],
        "exceed the model's limit",
    ),
    "budget under a trajectory": (["--vcpo-tokens-per-micro-batch", "32"], "--vcpo-tokens-per-micro-batch 32"),
    "published too seldom": (["--sync-interval", "4", "--rollout-max-lag", "2"], "raise --rollout-max-lag"),
    "phase longer than the lag": (["--rollout-steps-per-phase", "3", "--rollout-max-lag", "1"], "--rollout-max-lag"),
    "context parallelism on one process": (["--context-parallel-size", "2"], "x --context-parallel-size 2"),
    "dispatcher for GPUs": (["--moe-token-dispatcher-type", "flex"], "use alltoall"),
    "interleaving over gloo": (
        ["--no-overlap-p2p-communication", "--num-layers-per-virtual-pipeline-stage", "1"],
        "wrong gradients over gloo",
    ),
    "replay without experts": (
        ["--rollout-router-replay", "rollout"],
        "--rollout-router-replay rollout needs a mixture",
    ),
    "frozen router without experts": (["--vcpo-freeze-router"], "--vcpo-freeze-router needs a mixture"),
    "frozen bias without a bias": (
        ["--num-experts", "4", "--vcpo-freeze-expert-bias"],
        "needs --moe-router-enable-expert-bias",
    ),
    "replay past the router": (
        ["--num-experts", "4", "--rollout-router-replay", "training", "--moe-router-fusion"],
        "--rollout-router-replay does not go with --moe-router-fusion",
    ),
    "replay in pieces": (
        ["--num-experts", "4", "--rollout-router-replay", "training", "--mlp-chunks-for-training", "2"],
        "--rollout-router-replay does not go with --mlp-chunks-for-training",
    ),
    "replay of dropped tokens": (
        ["--num-experts", "4", "--rollout-router-replay", "rollout", "--moe-expert-capacity-factor", "1.0"],
        "--rollout-router-replay does not go with --moe-expert-capacity-factor",
    ),
    "dropout": (["--attention-dropout", "0.1"], "--attention-dropout must be 0.0"),
    "hidden dropout": (["--hidden-dropout", "0.1"], "--hidden-dropout must be 0.0"),
    "batch of its own": (["--global-batch-size", "8"], "= 16; drop it"),
    "micro-batches of its own": (["--micro-batch-size", "2"], "--micro-batch-size must be 1"),
    "Megatron's evaluation": (["--eval-iters", "3"], "--rollout-eval-interval"),
    "ramp-up": (["--rampup-batch-size", "1", "1", "10"], "--rampup-batch-size"),
    "tokenizer that is not there": (["--rollout-tokenizer", "/nowhere"], "/nowhere: there is no such folder"),
    "checkpoint that is not there": (["--load", "/nowhere"], "no checkpoint there"),
    "hub folder that is not there": (["--vcpo-load-hf", "/nowhere"], "there is no such folder"),
    "hub folder without config": (["--vcpo-load-hf", "/tmp"], "no config.json"),
    "tensor parallelism on one process": (["--tensor-model-parallel-size", "2"], "1 processes do not divide"),
    "engine larger than the job": (["--rollout-engine-tensor-parallel-size", "2"], "must divide the number of"),
    "biases": (["--normalization", "LayerNorm"], "--normalization RMSNorm"),
    "heads that do not divide": (["--num-attention-heads", "3"], "Megatron refuses"),
    "saving at no time": (["--save", "/tmp"], "--save-interval"),
    "save folder under a file": (["--save", "/dev/null/x"], "is not a folder"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_flags_that_cannot_work_together_are_refused(command_line: CommandLine, case: str) -> None:
    flags, fragment = CONTRADICTIONS[case]
    assert fragment in command_line.refusal(*flags)


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        ("--rollout-eval-num-prompts 7", "--rollout-eval-num-prompts does nothing without --rollout-eval-interval"),
        ("--rollout-eval-prompts /nowhere", "--rollout-eval-prompts does nothing without --rollout-eval-interval"),
        ("--vcpo-energy length --vcpo-baseline mean", "--vcpo-energy does nothing without --vcpo-baseline opob"),
        ("--vcpo-energy-method two-pass", "does nothing without --vcpo-energy exact"),
        ("--vcpo-ess-floor 0.1 --vcpo-ess-scaling off", "--vcpo-ess-floor does nothing without --vcpo-ess-scaling"),
        ("--vcpo-ess-reference-steps 9", "does nothing without --vcpo-ess-reference auto"),
        ("--vcpo-kl-estimator k2", "does nothing without --vcpo-kl-coefficient above 0"),
        ("--vcpo-correction-lower 0.5", "a lower bound, which sequence-tis has not"),
        ("--sync-verify off --sync-verify-tolerance 0.1", "does nothing without --sync-verify"),
        ("--save-interval 5", "no checkpoint will be written"),
    ],
)
def test_a_flag_that_does_nothing_is_named(command_line: CommandLine, flags: str, fragment: str) -> None:
    args, config = command_line.parse(*flags.split())
    (sentence,) = idle_flags(args, config)
    assert fragment in sentence


def test_plain_flags_all_do_something(command_line: CommandLine) -> None:
    assert idle_flags(*command_line.parse()) == []


@pytest.mark.parametrize(
    "name", ["num-layers", "hidden-size", "num-attention-heads", "seq-length", "train-iters", "lr"]
)
def test_a_missing_flag_of_megatron_is_named(
    command_line: CommandLine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = command_line.flags()
    place = complete.index(f"--{name}")
    monkeypatch.setattr(command_line, "flags", lambda *more: [*complete[:place], *complete[place + 2 :], *more])
    assert f"--{name} " in command_line.refusal()


def test_a_batch_that_does_not_divide_over_data_parallel_ranks_is_refused(command_line: CommandLine) -> None:
    command_line.processes = 3
    sentence = command_line.refusal()
    assert "16 trajectories" in sentence
    assert "3 data-parallel ranks" in sentence


def test_an_engine_that_does_not_divide_the_heads_is_refused(command_line: CommandLine) -> None:
    command_line.processes = 4
    assert "--num-attention-heads" in command_line.refusal("--rollout-engine-tensor-parallel-size", "4")


def test_a_lag_that_fits_the_publication_is_accepted(command_line: CommandLine) -> None:
    _, config = command_line.parse("--sync-interval", "4", "--rollout-max-lag", "3")
    assert config.staleness.steps_per_phase == 1
    _, config = command_line.parse("--rollout-max-lag", "3")
    assert config.staleness.steps_per_phase == 4


# ---------------------------------------------------------------------- folders


def test_a_new_run_may_load_from_its_own_save_folder(command_line: CommandLine, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    args, _ = command_line.parse("--save", folder, "--load", folder, "--save-interval", "2")
    assert args.load is None
    assert args.dataloader_save == folder
    assert Path(folder).is_dir()


def test_a_dry_run_creates_no_folder(command_line: CommandLine, tmp_path: Path) -> None:
    save = ("--save", str(tmp_path / "a" / "b"), "--save-interval", "2")
    command_line.check(*save, "--rollout-run-dir", str(tmp_path / "c"))
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("tracker", "fragment"),
    [(b"12", "iter_0000012"), (b"soon", "'soon'"), (b"\xff\xfe", "cannot be read"), (b"", "not the number")],
)
def test_a_damaged_checkpoint_folder_is_refused(
    command_line: CommandLine, tmp_path: Path, tracker: bytes, fragment: str
) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "iter_0000010").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_bytes(tracker)
    sentence = command_line.refusal("--load", str(folder), "--save", str(folder))
    assert fragment in sentence
    assert str(folder) in sentence


def test_a_save_folder_that_is_a_file_is_refused(command_line: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for more in ([], ["--vcpo-dry-run"]):
        with pytest.raises(ConfigError, match="--save"):
            command_line.parse("--save", str(tmp_path / "file"), *more)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_save_folder_that_cannot_be_written_to_is_refused(command_line: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert "not writable" in command_line.refusal("--save", str(folder))


def test_a_save_folder_without_permission_is_refused(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert "not writable" in command_line.refusal("--save", str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("verify", "verified"),
    [
        ("off", []),
        ("first", [0]),
        ("every", [0, 1, 2, 3, 4, 5, 6]),
        ("every-1", [0, 1, 2, 3, 4, 5, 6]),
        ("every-3", [0, 3, 6]),
    ],
)
def test_syncs_are_verified_as_often_as_asked(verify, verified):
    config = SyncConfig(verify=verify)
    config.validate()
    assert [n for n in range(7) if config.verifies(n)] == verified


@pytest.mark.parametrize("verify", ["", "never", "every-0", "every-", "every-x", "first-2", "every-1 "])
def test_another_word_for_how_often_syncs_are_verified_is_refused(verify):
    with pytest.raises(ConfigError, match=r"--sync-verify must be off, first or every-N"):
        SyncConfig(verify=verify).validate()


def test_an_engine_process_of_several_ranks_is_refused():
    RolloutConfig(engine_placement="process", prompts_per_step=1).validate()
    with pytest.raises(ConfigError, match=r"--rollout-engine-placement process needs .*-size 1"):
        RolloutConfig(engine_placement="process", engine_tensor_parallel_size=2).validate()
