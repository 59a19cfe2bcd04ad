"""Names of other tools for the keys of on-policy training: rows of `peer_names.py`."""

from stillhouse.config.peer_key import PeerKey

ON_POLICY = (
    PeerKey(
        ("rollout.share",),
        trl="lmbda", swift="lmbda", also="lambda on_policy_ratio",
        note="with the section rollout, the student writes this share of the completions; without the section, the"
        " run is off-policy (lmbda=0)",
    ),
    PeerKey(
        ("rollout.temperature", "objective.temperature"),
        trl="temperature", swift="temperature",
        note="the first is that of drawn tokens, the second that of the divergence; TRL's GKDTrainer has only the"
        " first, and its divergence is at temperature 1",
    ),
    PeerKey(("rollout.temperature",), verl="actor_rollout_ref.rollout.temperature"),
    PeerKey(
        ("rollout.writer",), trl="seq_kd", swift="seq_kd", note="seq_kd=True is rollout.writer=teacher",
    ),
    PeerKey(
        ("rollout.max_new_tokens",),
        trl="max_completion_length max_new_tokens", verl="data.max_response_length", swift="max_completion_length",
        also="max_tokens_to_generate",
    ),
    PeerKey(
        ("rollout.samples_per_prompt",),
        trl="num_generations", verl="actor_rollout_ref.rollout.n", swift="num_generations",
    ),
    PeerKey(
        ("rollout.engine",),
        trl="use_vllm vllm_mode", verl="actor_rollout_ref.rollout.name", swift="use_vllm vllm_mode",
        note="transformers, stillhouse, vllm or sglang; servers are named by rollout.url",
    ),
    PeerKey(
        ("rollout.url",), trl="vllm_server_base_url vllm_server_host", swift="vllm_server_host vllm_server_base_url",
    ),
    PeerKey(
        ("rollout.schedule",), verl="trainer.scheduler", note="sync, one_step_off, two_step_off or async",
    ),
    PeerKey(
        ("rollout.reward",),
        verl="custom_reward_function.path custom_reward_function.name", trl="reward_funcs", swift="reward_funcs",
        note="a Python function, package.module:function",
    ),
    PeerKey(("rollout.advantage",), verl="algorithm.adv_estimator", note="normalized (GRPO) or centered"),
    PeerKey(
        ("rollout.advantage", "rollout.deviation"),
        trl="scale_rewards", verl="algorithm.norm_adv_by_std_in_grpo", swift="scale_rewards",
        also="norm_adv_by_std_in_grpo",
        note="false, or none, is rollout.advantage=centered; true, or group, is rollout.advantage=normalized with"
        " rollout.deviation=sample; batch has no counterpart",
    ),
    PeerKey(
        ("rollout.environment", "rollout.max_turns"),
        verl="actor_rollout_ref.rollout.multi_turn.enable"
        " actor_rollout_ref.rollout.multi_turn.max_assistant_turns"
        " actor_rollout_ref.rollout.multi_turn.max_user_turns",
        note="the first is a Python function, package.module:function, that answers each turn of the student; the"
        " second bounds the turns; without the first there is one turn",
    ),
    PeerKey(
        ("objective.loss",),
        verl="actor_rollout_ref.actor.clip_ratio actor_rollout_ref.actor.clip_ratio_low"
        " actor_rollout_ref.actor.clip_ratio_high",
        trl="epsilon epsilon_high", swift="epsilon epsilon_high",
        also="cliprange clip_ratio clip_ratio_low clip_ratio_high",
        note="the limits of PPO's ratio are arguments of its term: policy_gradient(clip_low=0.2, clip_high=0.28)",
    ),
    PeerKey(
        ("objective.loss",),
        verl="actor_rollout_ref.actor.use_kl_loss algorithm.use_kl_in_reward", also="use_kl_loss use_kl_in_reward",
        note="a KL to another model is a term of the sum, with that model as the teacher: policy_gradient +"
        " 0.001*reverse_kl; in the reward: policy_gradient(teacher_kl=0.001); without such a term there is none",
    ),
    PeerKey(
        ("rollout.prompts_per_step",), verl="data.train_batch_size", also="gen_batch_size",
        note="off-policy, the batch is train.tokens_per_step",
    ),
)  # fmt: skip
