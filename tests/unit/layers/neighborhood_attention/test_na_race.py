"""The race of the schedules: measured once per device, Triton version and config, then read from the cache."""

import dataclasses

import pytest
import torch

from layers.neighborhood_attention import configs, flash, race

DEVICE, KERNEL = torch.device("cuda", 0), (3, 5, 5)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A list that grows by a config whenever one is timed; tile is the faster."""
    configs_timed = []

    def milliseconds(attend, config, *_):
        configs_timed.append(config)
        return 1.0 if isinstance(config, configs.TileConfig) else 2.0

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(race, "_milliseconds", milliseconds)
    monkeypatch.setattr(flash, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    return configs_timed


def run(arch="gfx942", kernel=KERNEL, triton="3.6.0"):
    race.faster_schedule.cache_clear()
    options = {"attend": flash.na3d_flash_attn, "triton": triton}
    return race.faster_schedule(configs.load(arch), DEVICE, kernel, 64, torch.bfloat16, **options)


def test_measures_once_and_remembers(measured):
    assert run() == "tile"
    assert len(measured) == 2
    assert run() == "tile"
    assert len(measured) == 2


def test_another_config_or_triton_is_measured_again(measured):
    run()
    run(arch="sm80")
    assert len(measured) == 4
    run(triton="3.7.0")
    assert len(measured) == 6


def test_the_winner_is_the_faster(measured, monkeypatch):
    monkeypatch.setattr(
        race, "_milliseconds", lambda attend, config, *_: 1.0 if isinstance(config, configs.RowConfig) else 2.0
    )
    assert run() == "row"


def test_a_kernel_too_wide_for_row_is_not_measured(measured):
    assert run(kernel=(3, 5, 35)) == "tile"
    assert measured == []


def test_a_broken_cache_is_said_and_measured_again(measured, caplog):
    race.cache_path().parent.mkdir(parents=True)
    race.cache_path().write_text("{")
    assert run() == "tile"
    assert "cannot read" in caplog.text
    assert run() == "tile"
    assert len(measured) == 2


def test_architectures_without_measurement_race(measured, monkeypatch):
    monkeypatch.setattr(configs, "arch_of", lambda device: "gfx950")
    race.faster_schedule.cache_clear()
    chosen = flash.choose_config(DEVICE, KERNEL, 64, torch.bfloat16)
    assert chosen == dataclasses.replace(configs.load("gfx950").tile(KERNEL, 64))
    assert len(measured) == 2
