#!/usr/bin/env bash
#SBATCH --job-name=cuseq
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append
# Trains on all GPUs of the job's nodes by trainer.py, or goes on from the newest checkpoint in OUT.
# Slurm sends SIGTERM two minutes before the time is up. trainer.py then saves a checkpoint and ends;
# it has 30 seconds for that, since torchrun, which gets the signal too, kills it then.
#   sbatch [--nodes N] examples/slurm.sh OUT [OPTION OF trainer.py...]
# Submit it in the clone. OUT has to be a folder that all nodes see. To go on when the time is up,
# submit the same line twice with --dependency=singleton.
set -euo pipefail
out=$1
shift
folder=(--output_dir "$out")
if compgen -G "$out/checkpoint-*/trainer_state.json" >/dev/null; then
  folder+=(--resume)
fi
read -r first_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # for torchrun's --max-restarts
srun --cpus-per-task "$SLURM_CPUS_PER_TASK" --kill-on-bad-exit torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first_node:29500" \
  examples/trainer.py "${folder[@]}" "$@"
